"""The static audit: no atomics and no order that the device decides, in source, PTX and SASS."""
