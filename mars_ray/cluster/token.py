"""The token of this user's clusters, for which they run code."""

from contextlib import suppress
from pathlib import Path


def keep_private() -> None:
    """Has the file of Ray's token readable for its owner only, before Ray writes one into it.

    Ray makes it readable for everybody, and takes an empty one for none.
    """
    path = Path.home() / ".ray" / "auth_token"
    # Where nothing can be written, or the file is mounted, the token comes from elsewhere.
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)
