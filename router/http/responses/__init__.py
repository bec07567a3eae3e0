"""`/v1/responses`: OpenAI's newer endpoint, without a store. A request is a chat under other names."""
