"""The package's exception family.

Every message is one line that says what is wrong and how to mend it: the command line prints it as
it is.
"""


class RedrafterError(Exception):
    """Base of everything that a user can mend; anything else that escapes is a defect."""


class InputError(RedrafterError):
    """An option, an environment variable or a prompt that cannot be used."""


class FormatError(RedrafterError):
    """A file that is broken, cut short or of an unknown kind."""


class DownloadError(RedrafterError):
    """A file that could not be fetched, or that is not the one expected."""


class CompatibilityError(RedrafterError):
    """A target, drafter or tokenizer that do not fit together."""
