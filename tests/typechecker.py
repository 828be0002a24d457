"""What looks at annotations while the tests run, see conftest.py."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as PEP 484 has it
