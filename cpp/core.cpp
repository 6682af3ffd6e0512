// A library needs a source file; the rest of the core comes from libsymm.a.
