/* Damages x86-64 ELF objects at positions that matter to a reader. */
#ifndef OCP_TESTS_DAMAGE_OBJECT_H
#define OCP_TESTS_DAMAGE_OBJECT_H

#include <stddef.h>
#include <stdint.h>

enum { DAMAGE_ROOM = 8 << 20 }; /* capacity for a damaged object, in bytes */

/* Starts the sequence of damages. */
void damage_seed(uint64_t seed);
/* One to four changes of the object: fields of its header, sections, symbols, relocations and kernel descriptions get
 * values at a border; entries change places or are doubled; the section table grows; the file ends early; bytes change.
 * `data` has room for DAMAGE_ROOM bytes. Returns its new length. */
size_t damage_object(unsigned char *data, size_t bytes);

#endif
