"""What commands share, without torch and mm: command lines, inputs, files, memory, HTML pages."""
