"""kvstore-master whose constants are settings as well, by flag, variable and file: for tests that cannot wait as long as operators do."""

import dataclasses

from kvstore.master.config import MasterSettings
from kvstore.protocol.settings import is_setting, setting

for _field in dataclasses.fields(MasterSettings):
    if not is_setting(_field):
        _field.metadata = setting(_field.default, "A constant of kvstore-master.").metadata

from kvstore.master import daemon  # noqa: E402 - its options are made of these fields

main = daemon.main

if __name__ == "__main__":
    main()
