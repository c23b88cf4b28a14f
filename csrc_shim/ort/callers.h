/* Which functions called the one that runs. */
#ifndef OCP_ORT_CALLERS_H
#define OCP_ORT_CALLERS_H

#include <stdbool.h>
#include <stddef.h>

/* Whether one of these functions of other libraries is among the callers; false where nobody can tell. It takes some
 * microseconds. */
bool ocp_called_from(void *const *functions, size_t count);

#endif
