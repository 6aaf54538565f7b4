"""What commands share, without torch and mm: command lines, files, pictures, formats of results."""
