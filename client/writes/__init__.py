"""Writes of values: reservation at the master, then transfer by message, into slots, or by the transfer engine."""
