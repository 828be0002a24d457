"""Programs that measure jflash; they need `pip install jflash[bench]`."""
