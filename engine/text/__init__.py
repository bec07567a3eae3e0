"""Answers as text: streams of complete characters, and grammars that answers must follow."""
