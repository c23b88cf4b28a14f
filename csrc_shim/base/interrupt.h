/* Counts SIGINT while work runs that may never end, so that this work can stop. */
#ifndef OCP_BASE_INTERRUPT_H
#define OCP_BASE_INTERRUPT_H

#include <stdint.h>

/* From ocp_interrupts_begin to the matching ocp_interrupts_end, a handler of this library counts SIGINT, and then calls
 * the application's handler. Calls nest, on any thread. If SIGINT is ignored or has its
 * default action, which ends the process, ocp_interrupts_begin changes nothing and does not count signals. */
void ocp_interrupts_begin(void);
void ocp_interrupts_end(void);
/* Returns the number of counted signals since the process has started. */
uint32_t ocp_interrupts(void);

#endif
