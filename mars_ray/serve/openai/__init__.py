"""OpenAI's API: bodies of requests and responses, validation, server-sent events."""
