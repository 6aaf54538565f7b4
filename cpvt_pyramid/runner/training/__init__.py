"""Where a training starts, resumes and stops, what it logs and draws, and its plan."""
