"""How a request's bytes move, alike on both sides: parts, movements, staging, and the leave to reach memory with its end."""
