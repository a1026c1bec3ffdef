"""`make gpu`: tests and figures of everything that copies to and from a GPU, on the machine's own torch."""
