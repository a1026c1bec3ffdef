"""An HTTP front for engines, which asks the master's scheduler where each request goes; and stand-in engines to try it with."""
