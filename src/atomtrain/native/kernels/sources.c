/* Tells from which sources the library was made. */
const char *atom_sources(void);
const char *atom_sources(void) { return ATOM_SOURCES; }
