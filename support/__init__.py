"""What the programs stand on: command line, model folders, output folder. No method is in here."""
