"""Device code: functions Triton compiles. Imports triton and nothing else, so that it compiles where torch is
missing."""
