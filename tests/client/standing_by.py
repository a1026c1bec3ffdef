"""Two masters that exist only as what they say: one hangs, and the other stands by until it is elected while a question waits."""

import contextlib
from collections.abc import Iterator

from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Flags
from tests.rpc.stub_masters import StubMaster, stub_masters


@contextlib.contextmanager
def one_hangs_and_the_other_is_elected() -> Iterator[tuple[StubMaster, StubMaster]]:
    """The one that hangs, and the one that answers that everything exists: elected once it has been asked twice who owns the catalog."""
    with stub_masters(2) as (elected, hanging):

        def welcome_as_owner_the_third_time() -> str:
            return "" if elected.hellos > 2 else hanging.address

        def there(message: Message) -> Message:
            return Flags(b"\1")

        elected.says_owner, elected.answer = welcome_as_owner_the_third_time, there
        yield hanging, elected
