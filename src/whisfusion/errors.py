"""Every error that a user can cause. Each also inherits the builtin that a caller would expect."""


class WhisfusionError(Exception):
    """Base of all errors raised on purpose; the message says what to do about it."""


class AudioError(WhisfusionError, ValueError):
    """A sound that cannot be read, or that holds nothing to read."""


class LanguageError(WhisfusionError, ValueError):
    """A language that is unknown, or that was not given where it is needed."""


class OptionError(WhisfusionError, ValueError):
    """Options that do not fit together; lists every problem at once."""

    @classmethod
    def collect(cls, problems: list[str]) -> None:
        """Raise one error that names all `problems`; do nothing if there are none."""
        if problems:
            raise cls("; ".join(problems))


class ModelError(WhisfusionError, ValueError):
    """A model folder or weight file that is missing, altered or of another kind."""


class ManifestError(WhisfusionError, ValueError):
    """A manifest that cannot be read; lists every bad line at once."""


class DownloadError(WhisfusionError, OSError):
    """A model that could not be fetched from the hub or the package registry."""
