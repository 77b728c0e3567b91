"""Files of strangers, and a process that is watched while it reads them."""
