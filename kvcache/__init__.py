"""Identity and shape of KV-cache blocks: namespaces, chained hashes, layouts, codecs, models, and traces of prompts.
No clock, no sockets."""
