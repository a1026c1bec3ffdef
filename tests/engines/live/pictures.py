"""What a prompt's image is to the model "images" (tiny_model.py) and to those who ask it."""

from typing import Final

IMAGE_TOKENS: Final = 32
"""That stand for one, before the prompt."""
IMAGE_PIXELS: Final = 56
"""On each side."""
