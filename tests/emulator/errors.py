"""What ends a run."""


class Fault(Exception):
    """What a GPU would trap on, or leave undefined."""


class Unknown(Exception):
    """PTX that the emulator does not know. It names the line and never guesses."""
