"""The one base class of every error that dobnb raises on purpose."""


class DobnbError(Exception):
    """A problem that a user can mend. The message is one line: what happened, why, and what to do."""
