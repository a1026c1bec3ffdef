"""Memory layouts of KV caches over ranks, and the copies that convert one layout into another."""
