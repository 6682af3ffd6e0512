// A library needs a source file; all else of the core comes from libsymm.a.
