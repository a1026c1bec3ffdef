"""How a request's bytes move, alike on both sides: parts, movements and streams, staging, and the leave to reach memory with its end."""
