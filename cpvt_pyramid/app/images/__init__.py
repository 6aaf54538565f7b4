"""Images in files: their formats, reading them whole or in parts, and the inputs of commands."""
