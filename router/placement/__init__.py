"""Where a request goes: views of the fleet, policies, and what came of their choices."""
