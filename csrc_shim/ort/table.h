/* The table of functions that Python may call (ocp_core). */
#ifndef OCP_ORT_TABLE_H
#define OCP_ORT_TABLE_H

#include "python/tables.h"

const ocp_core *ocp_core_table(void);

#endif
