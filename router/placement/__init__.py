"""Where a request goes: views of the fleet, policies, and the outcomes of their choices."""
