"""Generated from proto/ by tools/genproto. Never edited."""
