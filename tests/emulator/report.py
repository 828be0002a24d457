"""What a launch is found to have done."""

import collections
import dataclasses


@dataclasses.dataclass
class Report:
    """`problems`: results would be a matter of chance. `notes`: what ptxas has to mend. Both with how often."""

    problems: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    executed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # instructions, by warps
