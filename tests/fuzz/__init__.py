"""Coverage-guided fuzzing of all that is read from peers, disks and files: whatever the bytes, an answer or one typed error."""
