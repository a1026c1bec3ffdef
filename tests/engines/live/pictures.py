"""Image sizes shared by the model "images" (tiny_model.py) and the tests that send it images."""

from typing import Final

IMAGE_TOKENS: Final = 32
"""Tokens that stand for an image, before the prompt."""
IMAGE_PIXELS: Final = 56
"""Pixels of each side."""
