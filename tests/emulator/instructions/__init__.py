"""What each instruction does. Importing this teaches the translator all of them."""

from emulator.instructions import arithmetic as arithmetic
from emulator.instructions import bitwise as bitwise
from emulator.instructions import comparison as comparison
from emulator.instructions import conversion as conversion
from emulator.instructions import matrix as matrix
from emulator.instructions import movement as movement
from emulator.instructions import threads as threads
