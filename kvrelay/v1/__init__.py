"""Generated from proto/ by .ci/genproto. Never edited."""
