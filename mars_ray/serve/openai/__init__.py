"""OpenAI's API: request and response bodies, validation, server-sent events."""
