/* Inspects the call stack for functions of other libraries. */
#ifndef OCP_ORT_CALLERS_H
#define OCP_ORT_CALLERS_H

#include <stdbool.h>
#include <stddef.h>

/* Whether the function at one of these addresses is on the call stack; false if the stack cannot be unwound. Takes a
 * few microseconds. */
bool ocp_called_from(void *const *functions, size_t count);

#endif
