"""What ranks say to one another: the connections that carry it, and the roll call by which an executor agrees on what is over."""
