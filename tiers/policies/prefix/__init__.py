"""Policy `prefix`: blocks leave from the ends of their prompts, those first that are least likely to be read again."""
