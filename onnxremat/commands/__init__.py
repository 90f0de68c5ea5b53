"""The commands of the command line: each module adds its parsers and runs what they read."""
