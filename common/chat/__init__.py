"""Tools and reasoning in answers, as text: pure functions that need neither torch nor protobuf."""
