/* Damages x86-64 ELF objects where a reader is likely to fail. */
#ifndef OCP_TESTS_DAMAGE_OBJECT_H
#define OCP_TESTS_DAMAGE_OBJECT_H

#include <stddef.h>
#include <stdint.h>

enum { DAMAGE_ROOM = 8 << 20 }; /* capacity for a damaged object, in bytes */

/* Seeds the random changes. */
void damage_seed(uint64_t seed);
/* Makes one to four random changes of an object: boundary values in fields of the header, sections, symbols,
 * relocations and kernel descriptions; copied or swapped entries; a longer section table; a truncated file; random
 * bytes. `data` must have a capacity of DAMAGE_ROOM bytes. Returns the new length in bytes. */
size_t damage_object(unsigned char *data, size_t bytes);

#endif
