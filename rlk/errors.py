"""The two ways a run may end badly, and the exit status of each."""


class UsageError(Exception):
    """The user asked for something that cannot be done; exit status 2. The message is one line with a remedy."""

    exit_status = 2


class CheckFailed(Exception):
    """A promise of the contract was found broken; exit status 1."""

    exit_status = 1
