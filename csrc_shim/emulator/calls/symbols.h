/* The symbols that kernel objects may import. */
#ifndef OCP_EMULATOR_CALLS_SYMBOLS_H
#define OCP_EMULATOR_CALLS_SYMBOLS_H

/* Returns the address of the function that a kernel object may call by that name; NULL: there is none. */
const void *emu_symbol(const char *name);

#endif
