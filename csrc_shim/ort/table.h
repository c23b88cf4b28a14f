/* The table that Python gets: everything of the library that it may call. */
#ifndef OCP_ORT_TABLE_H
#define OCP_ORT_TABLE_H

#include "python/tables.h"

const ocp_core *ocp_core_table(void);

#endif
