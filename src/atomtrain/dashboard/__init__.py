"""Web page and terminal view of a run, fed by its event files only."""
