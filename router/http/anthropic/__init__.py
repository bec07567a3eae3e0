"""Anthropic's Messages API: a conversation becomes a chat's, and its answer content blocks."""
