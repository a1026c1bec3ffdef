"""Commands of `kvstore`: one module a command."""
