"""Coverage-guided fuzzing of everything parsed from peers, disks and files: any bytes give an answer or one typed
error.
"""
